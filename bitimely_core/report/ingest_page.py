"""Page of an ingest: status of every unit, reasons, quality of every channel, figures of the first
recording.

It shows faulty units, swapped channels and shifted hypnograms before training. It holds no subject
and no date, and names no unit that the ingest report does not name.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bitimely_core import cache, registry, storage
from bitimely_core.errors import Finding, Reason, UserError
from bitimely_core.page import (
    BarPlot,
    Figure,
    Page,
    PageBuilder,
    SpanLanes,
    Table,
    TimeSpan,
    Trace,
    TracePlot,
    make_figure,
    make_table,
    rename_units,
)
from bitimely_core.records import read_result, write_results
from bitimely_core.report.renderer import render_html
from bitimely_core.schemas.ingest import FindingRecord, IngestReport, TableReport
from bitimely_core.system_errors import find_system_error, format_size
from bitimely_core.types import Record, Signal

EXCERPT = 30.0  # seconds of the first figure
SHORT = 45.0  # seconds up to which a recording has one figure
COLUMNS = 620  # intervals of the overview
MAX_CHANNELS = 20  # of a figure
MAX_LANES = 10  # labels of a figure
MAX_BARS = 24  # channels or labels of a bar plot
MAX_UNITS = 200  # listed
MOST_WARNINGS = 12  # of channels
MAX_BAR_PLOTS = 3  # units of measurement that get a figure
# ratio to the channel's usual spread above which a warning points to the unit or gain
ODD_SCALE = 30.0
LINE_NOISE = 0.2  # share of the power from which on there is a warning
SignalRow = Mapping[str, Any]  # of `cache.Cache.signals`
# stages from top to bottom, as hypnograms are drawn
DEPTH = ("W", "R", "REM", "N1", "N2", "N3", "N4")
FAULTS = ("flat", "clipped", "missing", "out_of_range", "line_noise")
STATES = {
    "accepted": "accepted",
    "accepted, with a warning": "accepted_with_warning",
    "quarantined": "quarantined",
}
LEVELS = {"error": "quarantined", "warning": "warning", "info": "note"}


@dataclass
class IngestChannel:
    """A cached channel in one unit of measurement, with an entry per recording and segment."""

    name: str
    unit: str
    rates: set[float] = field(default_factory=set)  # Hz
    recordings: set[str] = field(default_factory=set)
    seconds: float = 0.0
    # quality figures, NaN: not measured
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def values(self, figure: str) -> np.ndarray:
        """The measured values of a quality figure."""
        values = np.array(self.figures[figure])
        return values[~np.isnan(values)]


def write_ingest_page(folder: str | Path, report: dict[str, Any]) -> list[Finding]:
    """Write `report.html` of an ingest (or of its error) into the cache's folder, unless it is
    there already.

    Returns a warning where that failed, whatever the cause: the cache is complete without it.
    """
    path = Path(folder) / cache.PAGE
    mark = storage.fingerprint(report)[:16]
    try:
        with suppress(OSError, UserError):  # absent or damaged
            if mark.encode() in read_result(path):
                return []
        shown = ingest_page(folder, IngestReport.parse(report, path))
        shown.facts["Fingerprint of the report"] = mark
        write_results(
            path.parent, {path.name: render_html(shown, alone=True).encode()}, beside=True
        )
    except Exception as error:
        with suppress(UserError):
            # it would show another ingest
            write_results(path.parent, {}, gone=[path.name], beside=True)
        fault = find_system_error(error, path) or error
        reason = fault.problem if isinstance(fault, UserError) else type(error).__name__
        problem, requirement = (
            f"the page could not be written ({reason})",
            "the cache is complete without it",
        )
        return [Finding(Reason.INTERNAL, problem, requirement, level="warning", file=str(path))]
    return []


def ingest_page(folder: str | Path, report: IngestReport) -> Page:
    """The page of an ingest. `folder` is not opened when nothing was published. Raises UserError:
    the cache cannot be read.
    """
    page = PageBuilder(f"Ingest of {report.dataset}")
    page.notice(*_list_notices(report))
    page.add_facts(_list_facts(report))
    page.section("Status of the units")
    page.add(*_unit_tables(report))
    # pages of Parquet have checksums of their own
    opened = cache.open_cache(folder, verify=False) if report.published else None
    if opened is not None and (add_content := CONTENT.get(opened.manifest.kind)):
        add_content(page, opened, report)
    if report.rules:
        page.section("Rules")
        caption = "Decisions of the reader of this data set where its files are ambiguous."
        rows = [[key.replace("_", " "), text] for key, text in sorted(report.rules.items())]
        page.table("rules", "Rules that were applied", caption, ["about", "rule"], rows)
    index = (
        opened.subjects() if opened is not None and opened.manifest.kind == "recordings" else None
    )
    return rename_units(
        page.finish(_describe_ingest(report)), registry.find_subject_unit(report.dataset, index)
    )


def _add_recordings(page: PageBuilder, opened: cache.Cache, report: IngestReport) -> None:
    """The first recording, quality of the channels, lengths and labels."""
    rows = opened.signals().to_dicts()
    channels, lengths, subjects = (
        _collect_channels(rows),
        _recording_lengths(rows),
        opened.subjects(),
    )
    n, n_subjects = subjects.height, subjects["subject_id"].n_unique()
    total = _format_duration(sum(lengths.values()))
    page.fact(
        "In the cache",
        f"{n:,} recording{'s' * (n != 1)} of {n_subjects:,} subject{'s' * (n_subjects != 1)}, {total} in total",
    )
    page.notice(*channel_warnings(channels))
    first = next(iter(opened.records(only=set(opened.recording_ids()[:1]))), None)
    if first is not None and first.signals:
        page.section("The first recording")
        page.add(*_draw_recording(first, report))
    page.section("Quality of the channels")
    page.add(*_quality_blocks(channels))
    content = [*_duration_figures(lengths), *_label_blocks(opened, report)]
    if content:
        page.section("Lengths and labels")
        page.add(*content)


# kind of a cache -> its sections; of others units and rows only
CONTENT = {"recordings": _add_recordings}

# ---- status of the units


def _describe_ingest(report: IngestReport) -> str:
    seen, lost, warned = (
        report.counts.units_seen,
        report.counts.quarantined,
        report.counts.accepted_with_warning,
    )
    if not report.published:
        return f"Refused, nothing was published: {report.error.message if report.error else 'see the reasons below'}"
    if seen == 1:
        accepted = "The only unit was accepted"
    else:
        accepted = (
            f"{seen - lost:,} of {seen:,} units were accepted"
            if lost
            else f"All {seen:,} units were accepted"
        )
    more = [f"{lost:,} {'was' if lost == 1 else 'were'} quarantined"] if lost else []
    more += ["with a warning" if seen == warned else f"{warned:,} with a warning"] if warned else []
    return f"{', '.join([accepted, *more])}."


def _list_notices(report: IngestReport) -> list[str]:
    options = report.options
    found = {
        "Nothing of this ingest is in the cache; an earlier generation, if any, is unchanged.": not report.published,
        "The files were not compared with SHA256SUMS.txt (--no-verify).": options.get("verify")
        is False,
        "Files that differ from SHA256SUMS.txt were quarantined.": report.source.sha256sums
        == "mismatch",
        "Header text that can identify persons was kept (--keep-phi): do not share this cache.": options.get(
            "keep_phi"
        ),
        "Start times were kept (--keep-dates): do not share this cache.": options.get("keep_dates"),
    }
    return [text for text, holds in found.items() if holds]


def _list_facts(report: IngestReport) -> dict[str, str]:
    source, dataset = report.source, registry.datasets.get(report.dataset)
    shown_elsewhere = {"keep_phi", "keep_dates", "strict", "max_bad", "follow_symlinks", "verify"}
    options = {
        key: value
        for key, value in report.options.items()
        if value is not None and key not in shown_elsewhere
    }
    out = {"Data set": dataset.facts.title if dataset else report.dataset}
    if source.path is not None:
        out["Source"] = f"{source.path}: {source.files:,} files, {format_size(source.bytes)}"
        out["SHA256SUMS.txt"] = {"absent": "none", "skipped": "not compared"}.get(
            source.sha256sums, source.sha256sums
        )
    if options:
        out["Options"] = ", ".join(f"{key} {value}" for key, value in sorted(options.items()))
    if report.generation is not None:
        out["Generation of the cache"] = (
            f"{report.generation}, content {(report.content_sha256 or '')[:16]}"
        )
    return out | {"Version": f"bitimely {report.tool.version}"}


def _unit_tables(report: IngestReport) -> Iterator[Table]:
    """Units by status, reasons, quarantined units, rows of tables."""
    caption = "A unit is accepted or quarantined as one: a recording with its labels, a record, or a table."
    yield make_table(
        "units",
        "Units",
        caption,
        ["status", "units"],
        [[name, getattr(report.counts, key)] for name, key in STATES.items()],
    )
    by_code: dict[tuple[str, str], list[tuple[str | None, FindingRecord]]] = defaultdict(list)
    for unit, reason in [
        *((u.unit, reason) for u in report.units for reason in u.reasons),
        *((None, reason) for reason in report.reasons),
    ]:
        by_code[reason.level, reason.code].append((unit, reason))
    order = list(LEVELS)
    reasons = [
        [
            LEVELS[level],
            code.replace("_", " "),
            len({unit for unit, _ in found if unit is not None}) or None,
            sum(reason.count for _, reason in found),
            found[0][1].message,
        ]
        for (level, code), found in sorted(
            by_code.items(), key=lambda pair: (order.index(pair[0][0]), -len(pair[1]), pair[0][1])
        )
    ]
    if reasons:
        caption = (
            "Each reason with its number of occurrences and its first message. Reasons without units concern the data set. ingest_report.json "
            "beside this page lists all of them."
        )
        yield make_table(
            "reasons",
            "Reasons",
            caption,
            ["status", "reason", "units", "occurrences", "example"],
            reasons,
        )
    lost = [unit for unit in report.units if unit.status == "quarantined"]
    if lost:
        yield make_table(
            "quarantined",
            "Quarantined units",
            f"{f'The first {MAX_UNITS} of {len(lost):,}. ' if len(lost) > MAX_UNITS else ''}Correct or replace the files and repeat the command: "
            "it reads only what has changed.",
            ["unit", "reason"],
            [
                [
                    u.unit,
                    "; ".join(reason.message for reason in u.reasons if reason.level == "error"),
                ]
                for u in lost[:MAX_UNITS]
            ],
        )
    if report.rows:
        columns = ["file", "kind", "seen", "used", "dropped", "quarantined"]
        caption = "Seen = used + dropped + quarantined. Dropped: left out by a documented rule. Quarantined: faulty."
        rows = [
            [*(getattr(row, column) for column in columns), _reason_text(row)]
            for row in report.rows
        ]
        yield make_table("rows", "Rows of tables", caption, [*columns, "reason"], rows)


def _reason_text(row: TableReport) -> str:
    parts = (row.quarantined_by_reason, row.dropped_by_reason, row.warned_by_reason)
    return ", ".join(
        f"{code.replace('_', ' ')} {count:,}"
        for part in parts
        for code, count in sorted(part.items())
    )


# ---- the channels


def _collect_channels(rows: Sequence[SignalRow]) -> list[IngestChannel]:
    """The channels of a cache in their order, one for each unit of measurement."""
    found: dict[tuple[str, str], IngestChannel] = {}
    figures = json.loads(f"[{','.join(row['qc'] for row in rows)}]")  # one call for many
    for row, quality in zip(rows, figures, strict=True):
        key = (row["channel"], row["unit"])
        channel = found.setdefault(key, IngestChannel(*key))
        channel.rates.add(row["rate"])
        channel.recordings.add(row["recording_id"])
        channel.seconds += row["n_samples"] / row["rate"]
        for name in (*FAULTS, "line_frequency", "min", "median", "max", "iqr"):
            value = quality.get(name)
            channel.figures[name].append(math.nan if value is None else value)
    return list(found.values())


def _recording_lengths(rows: Sequence[SignalRow]) -> dict[str, float]:
    """Recording -> seconds from its start to the end of its longest channel."""
    ends: dict[str, float] = defaultdict(float)
    for row in rows:
        ends[row["recording_id"]] = max(
            ends[row["recording_id"]], row["onset"] + row["n_samples"] / row["rate"]
        )
    return ends


def channel_warnings(channels: list[IngestChannel]) -> list[str]:
    """Channels of unusual scale, constant channels and line noise."""
    out = []
    for channel in channels:
        spread, many = channel.values("iqr"), len(channel.recordings)
        usual = float(np.median(spread[spread > 0])) if (spread > 0).any() else 0.0
        odd = (
            int(
                ((spread > ODD_SCALE * usual) | ((spread > 0) & (spread < usual / ODD_SCALE))).sum()
            )
            if len(spread) > 2
            else 0
        )
        if odd:
            out.append(
                f"{channel.name}: the interquartile range of {odd:,} of {len(spread):,} recordings is more than {ODD_SCALE:g} times wider or "
                "narrower than usual. Check their unit and gain."
            )
        constant = int((channel.values("min") == channel.values("max")).sum())
        if constant:
            out.append(
                f"{channel.name}: constant{f' in {constant:,} of {len(spread):,} recordings' if many > 1 else ''}."
            )
        noise = channel.values("line_noise")
        if len(noise) and float(np.median(noise)) > LINE_NOISE:
            frequency = _most_common(channel.values("line_frequency"))
            out.append(
                f"{channel.name}: line noise at {frequency} Hz is {100 * float(np.median(noise)):.0f} % of the power"
                f"{' in the median recording' if many > 1 else ''}; `bitimely tokenize --notch {frequency}` removes it."
            )
    if len(out) > MOST_WARNINGS:
        return [
            *out[:MOST_WARNINGS],
            f"And {len(out) - MOST_WARNINGS} more warnings: see the quality of the channels.",
        ]
    return out


def _reduce(values: np.ndarray, *statistics: Callable[[np.ndarray], Any]) -> list[float | None]:
    return [float(statistic(values)) if len(values) else None for statistic in statistics]


def _quality_blocks(channels: list[IngestChannel]) -> Iterator[Figure | Table]:
    """Physical values and faults of each channel."""
    yield make_table(
        "values",
        "Physical values",
        "Over all recordings: lowest and highest sample; of the median recording: median and interquartile range of the samples. A wrong gain or "
        "unit shows here.",
        [
            "channel and unit",
            "Hz",
            "recordings",
            "lowest",
            "median",
            "highest",
            "interquartile range",
        ],
        [
            [
                f"{channel.name}, {channel.unit or 'no unit'}",
                next(iter(channel.rates))
                if len(channel.rates) == 1
                else _format_rates(channel.rates),
                len(channel.recordings),
                *_reduce(channel.values("min"), np.min),
                *_reduce(channel.values("median"), np.median),
                *_reduce(channel.values("max"), np.max),
                *_reduce(channel.values("iqr"), np.median),
            ]
            for channel in channels
        ],
    )
    yield from _spread_figures(channels)
    shown = [name for name in FAULTS if any(channel.values(name).any() for channel in channels)]
    absent = [
        name
        for name in FAULTS
        if name not in shown and any(len(channel.values(name)) for channel in channels)
    ]
    noise = "line_noise" in shown
    yield make_table(
        "faults",
        "Faults",
        "Per cent of the samples in the median and in the worst recording. Flat: unchanged for a second or longer. Clipped: at the end of the "
        "converter's range, or at the recording's own extremes where the files do not state it. Out of range: outside of the range in the header. "
        "Line noise: per cent of the power above 0.5 Hz within 1 Hz of 50 or 60 Hz"
        f"{'' if noise else ', measured in channels of at least 122 Hz only'}. A dash: not measured."
        + (
            f" In no recording: {', '.join(name.replace('_', ' ') for name in absent)}."
            if absent
            else ""
        ),
        [
            "channel",
            *(f"{name.replace('_', ' ')}{end}" for name in shown for end in (" %", ", worst")),
            *(["line frequency, Hz"] * noise),
        ],
        [
            [
                channel.name,
                *(
                    value
                    for name in shown
                    for value in _reduce((100 * channel.values(name)).round(3), np.median, np.max)
                ),
                *([_most_common(channel.values("line_frequency"))] * noise),
            ]
            for channel in channels
        ],
    )


def _spread_figures(channels: list[IngestChannel]) -> Iterator[Figure]:
    """Interquartile ranges, a figure for each of the commonest units of measurement."""
    by_unit: dict[str, list[IngestChannel]] = defaultdict(list)
    for channel in channels:
        if len(channel.values("iqr")):
            by_unit[channel.unit].append(channel)
    for unit, of_unit in sorted(by_unit.items(), key=lambda pair: -len(pair[1]))[:MAX_BAR_PLOTS]:
        if len(of_unit) == 1 and len(of_unit[0].recordings) == 1:
            continue
        spreads = {channel.name: channel.values("iqr") for channel in of_unit[:MAX_BARS]}
        caption = (
            "Bar: interquartile range of the samples in the median recording; line: from the narrowest to the widest recording. A line that reaches "
            "far beyond the others indicates a recording of another scale."
            + (
                f" The first {MAX_BARS} of {len(of_unit)} channels."
                if len(of_unit) > MAX_BARS
                else ""
            )
        )
        yield make_figure(
            f"spread-{unit or 'none'}",
            f"Spread of the values, in {unit}"
            if unit
            else "Spread of the values, channels without a unit",
            caption,
            BarPlot(
                list(spreads),
                [float(np.median(v)) for v in spreads.values()],
                [float(v.min()) for v in spreads.values()],
                [float(v.max()) for v in spreads.values()],
                f"interquartile range{f', {unit}' if unit else ''}",
            ),
        )


def _most_common(values: np.ndarray) -> int | None:
    return next((int(value) for value, _ in Counter(values.tolist()).most_common(1)), None)


def _format_rates(values: set[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values)[:4]) + (
        ", ..." if len(values) > 4 else ""
    )


def _format_duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.{1 if seconds < 100 * size else 0}f} {unit}"
    return f"{seconds:.3g} s"


# ---- lengths and labels


def _duration_figures(lengths: dict[str, float]) -> Iterator[Figure]:
    """Recordings by length, where they differ."""
    seconds = np.array(list(lengths.values()))
    if len(seconds) < 2 or seconds.max() <= 1.01 * seconds.min():
        return
    counts, edges = np.histogram(seconds, bins=min(12, max(4, math.ceil(math.sqrt(len(seconds))))))
    names = [f"{_format_duration(a)} to {_format_duration(b)}" for a, b in pairwise(edges)]
    caption = "Recordings much shorter than the others may be truncated."
    yield make_figure(
        "lengths",
        "Lengths of the recordings",
        caption,
        BarPlot(names, counts.tolist(), ylabel="recordings"),
    )


def _label_blocks(opened: cache.Cache, report: IngestReport) -> Iterator[Figure | Table]:
    subjects, notes = opened.subjects(), opened.annotations()
    dataset = registry.datasets.get(report.dataset)
    views = dataset.facts.views.values() if dataset else ()
    for target, view in {
        view.target: view for view in views if view.task in {"classification", "multilabel"}
    }.items():
        if target is None or target not in subjects.columns:
            continue
        cells = subjects[target].to_list()
        counts = Counter(
            str(label)
            for cell in cells
            if cell is not None
            for label in (cell if isinstance(cell, list) else [cell])
        )
        names = [*view.classes, *sorted(set(counts) - set(view.classes))][:MAX_BARS]
        none = sum(cell is None for cell in cells)
        caption = (
            f"{none:,} of {len(cells):,} recordings have none."
            if none
            else "Every recording has one."
        ) + (" A recording may have several." if view.task == "multilabel" else "")
        bars = BarPlot(names, [counts[name] for name in names], ylabel="recordings")
        yield make_figure(
            f"labels-{target}", f"Recordings by {target.replace('_', ' ')}", caption, bars
        )
    if not notes.height:
        return
    name_label = _label_namer(report)
    durations: dict[str, list[float]] = defaultdict(list)
    recordings: dict[str, set[str]] = defaultdict(set)
    for recording, _, duration, label in notes.iter_rows():
        name = name_label(label)
        durations[name].append(duration)
        recordings[name].add(recording)
    rows = [
        [name, len(of := durations[name]), _format_duration(sum(of)), len(recordings[name])]
        for name in _sort_labels(durations)
    ]
    caption = "Annotations in the cache, cut at the ends of the signals."
    yield make_table(
        "annotations",
        "Annotations",
        caption,
        ["label", "annotations", "total duration", "recordings"],
        rows,
    )


def _label_namer(report: IngestReport) -> Callable[[str], str]:
    """Function from the text of an annotation to its displayed label: its class, if a view of the
    data set names one.

    Texts kept by --keep-phi can hold names, and numbers are no labels: both are only counted.
    """
    dataset = registry.datasets.get(report.dataset)
    classes = {
        text: name
        for view in (dataset.facts.views.values() if dataset else ())
        for text, name in (view.labels or {}).items()
    }

    def name_label(text: str) -> str:
        if text in classes:
            return classes[text]
        with suppress(ValueError):
            float(text)
            return "a number"
        return "other text" if report.options.get("keep_phi") else text

    return name_label


def _sort_labels(labels: Iterable[str]) -> list[str]:
    """Labels in drawing order: stages by depth, then the others by name."""
    return sorted(
        labels, key=lambda label: (DEPTH.index(label) if label in DEPTH else len(DEPTH), label)
    )


# ---- the first recording


def _draw_recording(record: Record, report: IngestReport) -> Iterator[Figure]:
    """The first half minute of a recording, then all of it as an envelope, with its labels on the
    same axis.
    """
    names = list(dict.fromkeys(signal.channel for signal in record.signals))
    channels = {
        name: [signal for signal in record.signals if signal.channel == name]
        for name in names[:MAX_CHANNELS]
    }
    seconds = max(signal.onset + len(signal.samples) / signal.rate for signal in record.signals)
    end = max([seconds, *(note.onset + note.duration for note in record.annotations)])
    omitted = (
        f" The first {MAX_CHANNELS} of {len(names)} channels." if len(names) > MAX_CHANNELS else ""
    )
    lanes = _annotation_lanes(record, report)
    shown_lanes = lanes if lanes.names else None
    complete = end <= SHORT
    start = min((signal.onset for signal in record.signals), default=0.0)
    rate = max(signal.rate for signals in channels.values() for signal in signals)
    stop = end if complete else min(end, start + EXCERPT)
    traces = [
        Trace(name, _resample_segments(signals, rate, start, stop), signals[0].unit)
        for name, signals in channels.items()
    ]
    yield make_figure(
        "excerpt",
        "The first recording" if complete else f"Its first {stop - start:.3g} seconds",
        "Physical units, each channel on its own scale. To check: upright heartbeats, an EEG of tens of microvolts, no swapped channels."
        + omitted,
        TracePlot(rate, traces, lanes=shown_lanes if complete else None),
    )
    if complete:
        return
    labels = (
        " Below: the labels on the same axis. They should change with the signals; a hypnogram that is shifted, too short or too long shows here."
        if shown_lanes
        else ""
    )
    interval = _format_duration(end / COLUMNS)
    yield make_figure(
        "overview",
        "All of it",
        f"{_format_duration(seconds)}: lowest and highest value of each of {COLUMNS} intervals of {interval}.{labels}{omitted}",
        TracePlot(
            2 * COLUMNS / end,
            [
                Trace(name, _segment_envelope(signals, end), signals[0].unit)
                for name, signals in channels.items()
            ],
            lanes=shown_lanes,
        ),
    )


def _annotation_lanes(record: Record, report: IngestReport) -> SpanLanes:
    """The annotations of a recording as spans by label; rare labels beyond MAX_LANES together."""
    name_label = _label_namer(report)
    counts = Counter(name_label(note.label) for note in record.annotations)
    kept = {
        name
        for name, _ in counts.most_common(MAX_LANES if len(counts) <= MAX_LANES else MAX_LANES - 1)
    }
    spans = [
        TimeSpan(
            note.onset,
            note.onset + note.duration,
            name if (name := name_label(note.label)) in kept else "others",
        )
        for note in record.annotations
    ]
    return SpanLanes([*_sort_labels(kept), *(["others"] if len(kept) < len(counts) else [])], spans)


def _to_physical(signal: Signal, first: int, stop: int) -> np.ndarray:
    return signal.samples[first:stop].astype(np.float64) * signal.scale + signal.offset


def _resample_segments(
    signals: Sequence[Signal], rate: float, start: float, stop: float
) -> np.ndarray:
    """Physical values of the segments of a channel at `rate` from `start` to `stop` seconds, slow
    ones held; NaN in gaps.
    """
    times = start + np.arange(round((stop - start) * rate)) / rate
    out = np.full(len(times), np.nan)
    for signal in signals:
        index = np.floor((times - signal.onset) * signal.rate + 1e-6).astype(np.int64)
        here = (index >= 0) & (index < len(signal.samples))
        if here.any():
            first = int(index[here][0])
            out[here] = _to_physical(signal, first, int(index[here][-1]) + 1)[index[here] - first]
    return out


def _segment_envelope(signals: Sequence[Signal], end: float) -> np.ndarray:
    """Lowest and highest physical value, in turn, of each of COLUMNS intervals from 0 to `end`
    seconds; NaN in gaps.
    """
    edges = np.linspace(0.0, end, COLUMNS + 1)
    low, high = np.full(COLUMNS, np.nan), np.full(COLUMNS, np.nan)
    for signal in signals:
        index = np.floor((edges - signal.onset) * signal.rate + 1e-6).astype(np.int64)
        for k, (first, stop) in enumerate(pairwise(index)):
            values = _to_physical(signal, max(int(first), 0), max(int(stop), int(first) + 1, 0))
            values = values[~np.isnan(values)]
            if len(values) and first < len(signal.samples):
                low[k], high[k] = np.fmin(low[k], values.min()), np.fmax(high[k], values.max())
    return np.stack([low, high], axis=1).reshape(-1)
