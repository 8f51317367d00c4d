"""EMG examples of PhysioNet (emgdb 1.0.0): needle EMG of three persons, one healthy, one with
myopathy, one with neuropathy.

One recording a class: the class is the person, the electrode and the day as well. No split by
subject is possible; the windows of each recording are split by time with a gap, and every score
carries a notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath

import numpy as np

from bitimely_core.errors import Finding, Reason, input_error, input_warning, safe_text
from bitimely_core.formats import wfdb
from bitimely_core.formats.source import Source, locate_errors, require_source
from bitimely_core.formats.units import find_factor, require_rate, scale_signal
from bitimely_core.registry import DatasetFacts, View, datasets
from bitimely_core.types import IngestOptions, IngestUnit, Record

RATE = 4000.0  # Hz
CHANNEL = "EMG"
CLASSES = ("healthy", "myopathy", "neuropathy")
RECORDS = {f"emg_{name}": name for name in CLASSES}
NOTICE = (
    "EMG: each class is one person (three recordings in all). A model that recognises the person, the electrode or the day is right too: "
    "these scores do not apply to the disease in other people."
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
                help="condition of the muscle from 375 ms of needle EMG; class = person, split by time with a gap",
            )
        },
        licence="ODC-BY 1.0",
        url="https://physionet.org/content/emgdb/1.0.0/",
        download="wget -r -N -c -np -nH --cut-dirs=3 https://physionet.org/files/emgdb/1.0.0/   (a few MB; no account needed)",
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
            "note": "204 = 33 + 73 + 98 windows before the split; the gaps between the blocks of time cost 2 in each recording",
        },
        rules={
            "units": f"the records {', '.join(RECORDS)}; the text copies of the signals are not read",
            "classes": "from the name of the record: one recording, and one person, a class",
            "split": "blocks of time in each recording: first 80 % train, then validation, then test, with a gap of a window before each",
            "channel": f"one signal called {CHANNEL}, {RATE:g} Hz, in mV ('mv' is a spelling of it)",
        },
    )
)
def emg(source: Source | None, options: IngestOptions) -> Iterator[IngestUnit | Finding]:
    """EMG examples (PhysioNet emgdb): three recordings, one a class."""
    source = require_source(source)
    headers = [rel for rel in sorted({*source.files, *source.rejected}) if rel.endswith(".hea")]
    found = [rel for rel in headers if PurePosixPath(rel).stem in RECORDS]
    if not found:
        wanted = f"expected {', '.join(f'{name}.hea' for name in RECORDS)}"
        raise input_error(
            Reason.NO_INPUT, f"no record of the data set among {len(source.files)} files", wanted
        )
    yield input_warning(
        Reason.LABEL_LEAKAGE, "each class is one person", "scores say nothing about other people"
    )
    for name in RECORDS:
        here = [rel for rel in found if PurePosixPath(rel).stem == name]
        if not here:
            yield input_warning(
                Reason.CLASS_MISSING,
                f"{name}.hea is missing",
                "its class is missing",
                "Download it",
            )
        elif len(here) > 1:
            raise input_error(
                Reason.DUPLICATE_KEY,
                f"{name}.hea exists {len(here)} times",
                "expected one",
                file=here[1],
            )
    for rel in headers:
        if rel not in found:
            yield input_warning(
                Reason.FILE_NAME, "is no record of this data set", "it is not read", file=rel
            )
    for rel in found:
        yield _make_unit(
            source,
            rel,
            keep_dates=bool(options.get("keep_dates")),
            keep_phi=bool(options.get("keep_phi")),
        )


def _make_unit(source: Source, rel: str, *, keep_dates: bool, keep_phi: bool) -> IngestUnit:
    """The record whose header is `rel`."""
    name = rel.removesuffix(".hea")
    files = tuple(
        file for file in (rel, f"{name}.dat") if file in source.files or file in source.rejected
    )
    faults = tuple(source.rejected[file] for file in files if file in source.rejected)
    if faults:
        return IngestUnit(name=name, files=files, read=None, findings=faults)
    own = Source(source.root, {file: source.files[file] for file in files}, {})
    return IngestUnit(
        name=name,
        files=files,
        read=partial(read_record, own, rel, keep_dates=keep_dates, keep_phi=keep_phi),
    )


def read_record(
    source: Source, rel: str, *, keep_dates: bool = False, keep_phi: bool = False
) -> Record:
    """One recording, in mV, with its class as attribute `condition`; `keep_phi`: keep the comments
    of the header as an attribute.

    Raises UserError: what keeps the recording out of the cache.
    """
    found = wfdb.read_recording(rel, source, required=(CHANNEL,), keep_phi=keep_phi)
    name = PurePosixPath(rel).stem
    findings = list(found.findings)
    with locate_errors(rel):
        signals = [signal for signal in found.signals if signal.channel.upper() == CHANNEL]
        if not signals:
            text, wanted = (
                f"has no signal {CHANNEL}",
                f"found {', '.join(safe_text(signal.channel) for signal in found.signals[:12])}",
            )
            raise input_error(
                Reason.MISSING_CHANNEL, text, wanted, field="description", expected=CHANNEL
            )
        first = signals[0]
        require_rate(first, RATE)
        factor = find_factor(first, "mV")
        if factor != 1.0:
            findings.append(
                input_warning(
                    Reason.UNIT, f"is in {first.unit}", "converted to mV by its scale", field="unit"
                )
            )
        if not any(
            np.fmin.reduce(signal.samples) < np.fmax.reduce(signal.samples) for signal in signals
        ):
            findings.append(input_warning(Reason.FLAT_CHANNEL, "is constant", field=CHANNEL))
    start, comments = found.header.start, found.header.comments
    return Record(
        recording_id=name,
        subject_id=name,
        signals=[
            scale_signal(signal, factor, "mV")._replace(channel=CHANNEL) for signal in signals
        ],
        attributes={
            "condition": RECORDS[name],
            **({"comments": list(comments)} if comments else {}),
        },
        start_time=start.isoformat() if keep_dates and start is not None else None,
        findings=[finding.at(rel) for finding in findings],
    )
