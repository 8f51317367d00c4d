"""`ingest` with its page: what was taken, what was left and why, the quality of every channel, a picture of the first recording.

The page shows what a wrong unit, a swapped channel or a shifted hypnogram looks like before anything is trained on it. It shows no
subject and no date, and names no unit that the ingest report does not name.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bitimely_core import cache, registry, storage
from bitimely_core.errors import Finding, Reason, UserError
from bitimely_core.page import Figure, Page, Table
from bitimely_core.types import Record, Signal

EXCERPT = 30.0  # seconds of the first picture
SHORT = 45.0  # seconds up to which a recording has one picture
COLUMNS = 620  # stretches of the overview
DRAWN = 20  # channels of a picture
LANES = 10  # labels of a picture
BARS = 24  # channels or labels of a figure of bars
LISTED = 200  # units that are listed
UNITS = 3  # units of measurement that get a figure
ODD_SCALE = 30.0  # times the usual spread of a channel, from which on the scale of a recording is doubted
HUM = 0.2  # share of the power, from which on line noise is worth a notice
DEPTH = ("W", "R", "REM", "N1", "N2", "N3", "N4")  # stages from top to bottom, as hypnograms are drawn
FAULTS = ("flat", "clipped", "missing", "out_of_range", "line_noise")

Blocks = list[Figure | Table | str]


@dataclass
class IngestChannel:
    """All that is cached of one channel in one unit of measurement: an entry a recording and segment."""

    name: str
    unit: str
    rates: set[float] = field(default_factory=set)  # Hz
    recordings: set[str] = field(default_factory=set)
    seconds: float = 0.0
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # quality figures, NaN where there is none

    def of(self, figure: str) -> np.ndarray:
        """The figures that are there."""
        values = np.array(self.figures[figure])
        return values[~np.isnan(values)]


def write_ingest_page(folder: str | Path, report: dict[str, Any]) -> list[Finding]:
    """Write `report.html` of an ingest into the cache's folder, unless it is there already.

    Args:
        folder: of the cache.
        report: what `cache.ingest` returned, or the report of its error.

    Returns:
        A warning where that failed, whatever the cause: the cache is whole without it.
    """
    from bitimely_core import report as pages

    path = Path(folder) / cache.PAGE
    mark = storage.fingerprint(report)[:16]
    try:
        if path.is_file() and mark.encode() in path.read_bytes():
            return []
        shown = ingest_page(folder, report)
        shown.facts["Fingerprint of the report"] = mark
        storage.write_bytes(path, pages.render_html(shown, alone=True).encode())
    except Exception as error:
        with suppress(OSError):
            path.unlink()  # it would show another ingest
        why = error.problem if isinstance(error, UserError) else type(error).__name__
        text, wanted = f"the page could not be written ({why})", "the cache is whole without it"
        return [Finding(code=Reason.INTERNAL, level="warning", problem=text, requirement=wanted, file=str(path))]
    return []


def ingest_page(folder: str | Path, report: dict[str, Any]) -> Page:
    """The page of an ingest.

    Args:
        folder: of the cache; not opened when nothing was published.
        report: what `cache.ingest` returned, or the report of its error.

    Raises:
        UserError: the cache cannot be read.
    """
    blocks: Blocks = ["## What was taken, what was left", *_unit_tables(report)]
    notices, facts = _list_notices(report), _list_facts(report)
    opened = cache.open_cache(folder, verify=False) if report["published"] else None  # pages of Parquet have checksums of their own
    if opened is not None and opened.manifest["kind"] == "recordings":  # of claims: what was taken, and the rows
        rows = opened.signals().to_dicts()
        channels = _collect_channels(rows)
        subjects = opened.subjects()
        facts["In the cache"] = (
            f"{subjects.height:,} recording{'s' * (subjects.height != 1)} of {subjects['subject_id'].n_unique():,} "
            f"subject{'s' * (subjects['subject_id'].n_unique() != 1)}, {_format_duration(sum(_recording_lengths(rows).values()))} in all"
        )
        notices += _channel_warnings(channels)
        first = next(iter(opened.records(only=set(opened.recording_ids()[:1]))), None)
        if first is not None and first.signals:
            blocks += ["## The first recording", *_draw_recording(first, report)]
        blocks += ["## Quality of the channels", *_quality_blocks(channels)]
        content = [*_duration_figures(_recording_lengths(rows)), *_label_blocks(opened, report)]
        blocks += ["## Lengths and labels", *content] if content else []
    if report["rules"]:
        rules = Table(
            name="rules",
            title="Rules that were applied",
            caption="What the reader of this data set does where its files leave something open.",
            columns=["about", "rule"],
            rows=[[key.replace("_", " "), text] for key, text in sorted(report["rules"].items())],
        )
        blocks += ["## Rules", rules]
    return Page(title=f"Ingest of {report['dataset']}", verdict=_describe_ingest(report), notices=notices, blocks=blocks, facts=facts)


# ---- what became of the units


def _describe_ingest(report: dict[str, Any]) -> str:
    counts = report["counts"]
    seen, lost, warned = counts["units_seen"], counts["quarantined"], counts["accepted_with_warning"]
    if not report["published"]:
        return f"Refused, nothing was published: {report['error']['message'] if report['error'] else 'see the reasons below'}"
    taken = (
        "The only unit was taken"
        if seen == 1
        else f"{'All ' * (not lost)}{seen - lost:,}{f' of {seen:,}' if lost else ''} units were taken"
    )
    more = [f"{lost:,} {'was' if lost == 1 else 'were'} left out"] if lost else []
    more += ["with a warning" if seen == warned else f"{warned:,} with a warning"] if warned else []
    return f"{', '.join([taken, *more])}."


def _list_notices(report: dict[str, Any]) -> list[str]:
    """What must be known before anything else."""
    options = report["options"]
    said = {
        "nothing of this ingest is in the cache; a former generation, if there was one, is untouched": not report["published"],
        "the files were not compared with SHA256SUMS.txt (--no-verify)": options.get("verify") is False,
        "files differ from SHA256SUMS.txt: they are left out": report["source"]["sha256sums"] == "mismatch",
        "header text that can identify persons was kept (--keep-phi): this cache is not for passing on": options.get("keep_phi"),
        "start times were kept (--keep-dates): this cache is not for passing on": options.get("keep_dates"),
    }
    return [f"{text[0].upper()}{text[1:]}." for text, here in said.items() if here]


def _list_facts(report: dict[str, Any]) -> dict[str, str]:
    source, dataset = report["source"], registry.datasets.get(report["dataset"])
    plain = {"keep_phi", "keep_dates", "strict", "max_bad", "follow_symlinks", "verify"}
    options = {key: value for key, value in report["options"].items() if value is not None and key not in plain}
    out = {"Data set": dataset.facts.title if dataset else report["dataset"]}
    if source["path"] is not None:
        out["Source"] = f"{source['path']}: {source['files']:,} files, {storage.format_size(source['bytes'])}"
        out["SHA256SUMS.txt"] = {"absent": "none there", "skipped": "not compared"}.get(source["sha256sums"], source["sha256sums"])
    if options:
        out["Options"] = ", ".join(f"{key} {value}" for key, value in sorted(options.items()))
    if report["generation"] is not None:
        out["Generation of the cache"] = f"{report['generation']}, content {report['content_sha256'][:16]}"
    return out | {"Version": f"bitimely {report['tool']['version']}"}


def _unit_tables(report: dict[str, Any]) -> Iterator[Figure | Table]:
    """Units by status, reasons, units that were left out, rows of tables."""
    counts = report["counts"]
    states = {"taken": "accepted", "taken, with a warning": "accepted_with_warning", "left out": "quarantined"}
    yield Table(
        name="units",
        title="Units",
        caption="A unit is what is taken or left as a whole: a recording with its labels, a record, or a table.",
        columns=["what became of it", "units"],
        rows=[[name, counts[key]] for name, key in states.items()],
    )
    named = [(unit["unit"], reason) for unit in report["units"] for reason in unit["reasons"]]
    named += [(None, reason) for reason in report["reasons"]]
    by_code: dict[tuple[str, str], list[tuple[str | None, dict[str, Any]]]] = defaultdict(list)
    for unit, reason in named:
        by_code[reason["level"], reason["code"]].append((unit, reason))
    levels = ("error", "warning", "info")
    reasons = [
        [
            {"error": "left out", "warning": "warning", "info": "note"}[level],
            code.replace("_", " "),
            len({unit for unit, _ in found if unit is not None}) or None,
            sum(reason["count"] for _, reason in found),
            found[0][1]["message"],
        ]
        for (level, code), found in sorted(by_code.items(), key=lambda pair: (levels.index(pair[0][0]), -len(pair[1]), pair[0][1]))
    ]
    if reasons:
        yield Table(
            name="reasons",
            title="Reasons",
            caption="What was odd, how often, and the first such message. Without a number of units it is about the data set as a whole. "
            "ingest_report.json beside this page has all of them.",
            columns=["what follows", "reason", "units", "occurrences", "for example"],
            rows=reasons,
        )
    lost = [unit for unit in report["units"] if unit["status"] == "quarantined"]
    if lost:
        yield Table(
            name="left-out",
            title="Units that were left out",
            caption=f"{f'The first {LISTED} of {len(lost):,}. ' if len(lost) > LISTED else ''}Mend or replace the files and give the same command "
            "again: it reads only what has changed.",
            columns=["unit", "why"],
            rows=[
                [unit["unit"], "; ".join(reason["message"] for reason in unit["reasons"] if reason["level"] == "error")]
                for unit in lost[:LISTED]
            ],
        )
    if report["rows"]:
        parts = ("quarantined_by_reason", "dropped_by_reason", "warned_by_reason")
        yield Table(
            name="rows",
            title="Rows of tables",
            caption="Seen = used + dropped + quarantined. Dropped: left out by a documented rule. Quarantined: faulty.",
            columns=["file", "kind", "seen", "used", "dropped", "quarantined", "why"],
            rows=[
                [*(row[key] for key in ("file", "kind", "seen", "used", "dropped", "quarantined")), _reason_text(row, parts)]
                for row in report["rows"]
            ],
        )


def _reason_text(row: dict[str, Any], parts: Iterable[str]) -> str:
    return ", ".join(f"{code.replace('_', ' ')} {count:,}" for part in parts for code, count in sorted(row[part].items()))


# ---- the channels


def _collect_channels(rows: list[dict[str, Any]]) -> list[IngestChannel]:
    """The channels of a cache in the order in which they come, those of several units of measurement as several."""
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


def _recording_lengths(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Recording -> seconds from its start to the end of its longest channel."""
    ends: dict[str, float] = defaultdict(float)
    for row in rows:
        ends[row["recording_id"]] = max(ends[row["recording_id"]], row["onset"] + row["n_samples"] / row["rate"])
    return ends


def _channel_warnings(channels: list[IngestChannel]) -> list[str]:
    """What the quality figures say against a channel."""
    said = []
    for channel in channels:
        spread, many = channel.of("iqr"), len(channel.recordings)
        usual = float(np.median(spread[spread > 0])) if (spread > 0).any() else 0.0
        odd = int(((spread > ODD_SCALE * usual) | ((spread > 0) & (spread < usual / ODD_SCALE))).sum()) if len(spread) > 2 else 0
        if odd:
            said.append(
                f"{channel.name}: the values of {odd:,} of {len(spread):,} recordings spread more than {ODD_SCALE:g} times wider or narrower "
                "than usual. Is their unit or gain right?"
            )
        constant = int((channel.of("min") == channel.of("max")).sum())
        if constant:
            said.append(f"{channel.name}: constant{f' in {constant:,} of {len(spread):,} recordings' if many > 1 else ''}.")
        hum = channel.of("line_noise")
        if len(hum) and float(np.median(hum)) > HUM:
            mains = _most_common(channel.of("line_frequency"))
            said.append(
                f"{channel.name}: hum of the mains at {mains} Hz makes up {100 * float(np.median(hum)):.0f} % of the power"
                f"{' in the median recording' if many > 1 else ''}; `bitimely tokenize --notch {mains}` takes it out."
            )
    shown = said[:12]
    return [*shown, f"And {len(said) - 12} more such remarks: see the quality of the channels."] if len(said) > 12 else shown


def _quality_blocks(channels: list[IngestChannel]) -> Iterator[Figure | Table]:
    """Physical values and faults of each channel."""

    def ends(values: np.ndarray, *parts: Callable[[np.ndarray], Any]) -> list[float | None]:
        return [float(part(values)) if len(values) else None for part in parts]

    yield Table(
        name="values",
        title="Physical values",
        caption="Over all recordings: lowest and highest sample; of the median recording the median sample and the width of the middle half of "
        "the samples (interquartile range). A wrong gain or unit shows here.",
        columns=["channel and unit", "Hz", "recordings", "lowest", "median", "highest", "middle half"],
        rows=[
            [
                f"{channel.name}, {channel.unit or 'no unit'}",
                next(iter(channel.rates)) if len(channel.rates) == 1 else _format_rates(channel.rates),
                len(channel.recordings),
                *ends(channel.of("min"), np.min),
                *ends(channel.of("median"), np.median),
                *ends(channel.of("max"), np.max),
                *ends(channel.of("iqr"), np.median),
            ]
            for channel in channels
        ],
    )
    measured: dict[str, list[IngestChannel]] = defaultdict(list)
    for channel in channels:
        if len(channel.of("iqr")):
            measured[channel.unit].append(channel)
    for unit, those in sorted(measured.items(), key=lambda pair: -len(pair[1]))[:UNITS]:
        if len(those) == 1 and len(those[0].recordings) == 1:
            continue
        spreads = [channel.of("iqr") for channel in those[:BARS]]
        yield Figure(
            name=f"spread-{unit or 'none'}",
            title=f"How wide the values spread, in {unit}" if unit else "How wide the values spread, channels without a unit",
            caption="Bar: the middle half of the samples in the median recording; line: from the narrowest to the widest recording. A line that "
            "reaches far beyond the others is a recording of another scale."
            + (f" The first {BARS} of {len(those)} channels." if len(those) > BARS else ""),
            kind="bars",
            data={
                "names": [channel.name for channel in those[:BARS]],
                "values": [float(np.median(values)) for values in spreads],
                "lo": [float(values.min()) for values in spreads],
                "hi": [float(values.max()) for values in spreads],
                "ylabel": f"interquartile range{f', {unit}' if unit else ''}",
            },
        )
    shown = [name for name in FAULTS if any(channel.of(name).any() for channel in channels)]
    known = {name for name in FAULTS if any(len(channel.of(name)) for channel in channels)}
    none = ", ".join(name.replace("_", " ") for name in FAULTS if name in known and name not in shown)
    hum = "line_noise" in shown
    yield Table(
        name="faults",
        title="Faults",
        caption="Per cent of the samples in the median and in the worst recording. Flat: unchanged for a second or longer. Clipped: at the end "
        "of the converter's range, or at the recording's own extremes where the files do not tell it. Out of range: beyond what the header promises. Line noise: per cent of the power above 0.5 Hz that lies within 1 Hz of "
        f"50 or of 60 Hz{'' if hum else ', which only channels of 122 Hz or more can show'}. A dash: not to be told."
        + (f" In no recording: {none}." if none else ""),
        columns=[
            "channel",
            *(f"{name.replace('_', ' ')}{end}" for name in shown for end in (" %", ", worst")),
            *(["mains, Hz"] if hum else []),
        ],
        rows=[
            [
                channel.name,
                *(value for name in shown for value in ends((100 * channel.of(name)).round(3), np.median, np.max)),
                *([_most_common(channel.of("line_frequency"))] if hum else []),
            ]
            for channel in channels
        ],
    )


def _most_common(values: np.ndarray) -> int | None:
    """Of frequencies in Hz."""
    return next((int(value) for value, _ in Counter(values.tolist()).most_common(1)), None)


def _format_rates(values: set[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values)[:4]) + (", ..." if len(values) > 4 else "")


def _format_duration(seconds: float) -> str:
    """A length of time for people."""
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
    yield Figure(
        name="lengths",
        title="Lengths of the recordings",
        caption="A recording that is much shorter than the others was perhaps cut off.",
        kind="bars",
        data={
            "names": [f"{_format_duration(a)} to {_format_duration(b)}" for a, b in pairwise(edges)],
            "values": counts.tolist(),
            "ylabel": "recordings",
        },
    )


def _label_blocks(opened: cache.Cache, report: dict[str, Any]) -> Iterator[Figure | Table]:
    """How often each label is there: classes of recordings, annotations."""
    subjects, notes = opened.subjects(), opened.annotations()
    dataset = registry.datasets.get(report["dataset"])
    targets = {
        view.target: view for view in (dataset.facts.views.values() if dataset else ()) if view.task in {"classification", "multilabel"}
    }
    for target, view in targets.items():
        if target is None or target not in subjects.columns:
            continue
        cells = subjects[target].to_list()
        counts = Counter(str(label) for cell in cells if cell is not None for label in (cell if isinstance(cell, list) else [cell]))
        names = [*view.classes, *sorted(set(counts) - set(view.classes))][:BARS]
        none = sum(cell is None for cell in cells)
        yield Figure(
            name=f"labels-{target}",
            title=f"Recordings by {target.replace('_', ' ')}",
            caption=(f"{none:,} of {len(cells):,} recordings have none." if none else "Every recording has one.")
            + (" A recording may have several." if view.task == "multilabel" else ""),
            kind="bars",
            data={"names": names, "values": [counts[name] for name in names], "ylabel": "recordings"},
        )
    if not notes.height:
        return
    kind = _label_namer(report)
    total: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    holders: dict[str, set[str]] = defaultdict(set)
    for recording, _, duration, label in notes.iter_rows():
        name = kind(label)
        total[name][0] += 1
        total[name][1] += duration
        holders[name].add(recording)
    order = _sort_labels(total)
    yield Table(
        name="annotations",
        title="Annotations",
        caption="What stands in the cache, after what reaches beyond the signals was cut off.",
        columns=["label", "annotations", "length in all", "recordings"],
        rows=[[name, int(total[name][0]), _format_duration(total[name][1]), len(holders[name])] for name in order],
    )


def _label_namer(report: dict[str, Any]) -> Callable[[str], str]:
    """Text of an annotation -> the label under which it is shown: its class, if a view of the data set names one.

    Texts that were kept because the user asked for them (--keep-phi) can hold names, and numbers are no labels: both are only counted.
    """
    dataset = registry.datasets.get(report["dataset"])
    classes = {text: name for view in (dataset.facts.views.values() if dataset else ()) for text, name in (view.labels or {}).items()}

    def named(text: str) -> str:
        if text in classes:
            return classes[text]
        with suppress(ValueError):
            float(text)
            return "a number"
        return "other text" if report["options"].get("keep_phi") else text

    return named


def _sort_labels(labels: Iterable[str]) -> list[str]:
    """Labels as they are drawn: stages by depth, then the others by name."""
    return sorted(labels, key=lambda label: (DEPTH.index(label) if label in DEPTH else len(DEPTH), label))


# ---- the picture


def _draw_recording(record: Record, report: dict[str, Any]) -> Iterator[Figure]:
    """The first half minute of a recording as it is, then all of it as an envelope, with its labels on the same axis."""
    names = list(dict.fromkeys(signal.channel for signal in record.signals))
    channels = {name: [signal for signal in record.signals if signal.channel == name] for name in names[:DRAWN]}
    seconds = max(signal.onset + len(signal.samples) / signal.rate for signal in record.signals)
    end = max([seconds, *(note.onset + note.duration for note in record.annotations)])
    left = f" The first {DRAWN} of {len(names)} channels." if len(names) > DRAWN else ""
    lanes = _annotation_lanes(record, report)
    whole = end <= SHORT
    start = min((signal.onset for signal in record.signals), default=0.0)
    rate = max(signal.rate for signals in channels.values() for signal in signals)
    stop = end if whole else min(end, start + EXCERPT)
    yield Figure(
        name="excerpt",
        title="The whole of the first recording" if whole else f"Its first {stop - start:.3g} seconds",
        caption="Physical units, each channel on its own scale. Are the heartbeats upright, is the EEG tens of microvolts high, is nothing "
        f"swapped?{left}",
        kind="traces",
        data={
            "rate": rate,
            "signals": [
                {"name": name, "unit": signals[0].unit, "values": _resample_segments(signals, rate, start, stop)}
                for name, signals in channels.items()
            ],
            **({"lanes": lanes} if whole and lanes["names"] else {}),
        },
    )
    if whole:
        return
    labelled = (
        " Below: the labels, on the same axis. They should change where the signals do; a hypnogram that is shifted against them, or too "
        "short or too long, shows here."
        if lanes["names"]
        else ""
    )
    yield Figure(
        name="overview",
        title="The whole of it",
        caption=f"{_format_duration(seconds)}: lowest and highest value of each of {COLUMNS} stretches of {_format_duration(end / COLUMNS)}.{labelled}{left}",
        kind="traces",
        data={
            "rate": 2 * COLUMNS / end,
            "signals": [
                {"name": name, "unit": signals[0].unit, "values": _segment_envelope(signals, end)} for name, signals in channels.items()
            ],
            **({"lanes": lanes} if lanes["names"] else {}),
        },
    )


def _annotation_lanes(record: Record, report: dict[str, Any]) -> dict[str, Any]:
    """The annotations of a recording as spans, by label; rare labels beyond LANES together."""
    kind = _label_namer(report)
    counts = Counter(kind(note.label) for note in record.annotations)
    kept = {name for name, _ in counts.most_common(LANES if len(counts) <= LANES else LANES - 1)}
    spans = [
        {"start": note.onset, "stop": note.onset + note.duration, "name": name if (name := kind(note.label)) in kept else "others"}
        for note in record.annotations
    ]
    return {"names": [*_sort_labels(kept), *(["others"] if len(kept) < len(counts) else [])], "spans": spans}


def _to_physical(signal: Signal, first: int, stop: int) -> np.ndarray:
    return signal.samples[first:stop].astype(np.float64) * signal.scale + signal.offset


def _resample_segments(signals: Sequence[Signal], rate: float, start: float, stop: float) -> np.ndarray:
    """Physical values of the segments of a channel at `rate` from `start` to `stop` seconds, slow ones held; NaN where there is none."""
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
    """Lowest and highest physical value, in turn, of each of COLUMNS stretches of the time from 0 to `end`; NaN where there is none."""
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
