"""Chooses the channels of a recording: alternatives and derivations of the map, channels that are
no signals, and the units that a file leaves open.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from bitimely_core.errors import Finding, Reason, UserError, input_error, input_warning, safe_text
from bitimely_core.formats.units import (
    MANGLED,
    find_unit,
    find_unit_factor,
    is_far_off,
    is_voltage_channel,
    list_plausible_units,
    measure_spread,
    scale_signal,
)
from bitimely_core.recordings.mapping import NO_FACTS, ChannelChoice, FileRule, RecordingInfo
from bitimely_core.types import Annotation, Signal, find_only, group_by

MINUS = " - "  # of a derivation in a map
# names of channels that are no signals, in small letters and digits alone
CODES = re.compile(
    r"(edf|bdf)?annotations?|status|statuschannel|(dc|digital|analog|ext|external|parallel)?"
    r"(trig(ger)?s?|stim|ttl|mark(er)?s?|events?)(in|input|channel|ch|codes?|marker|event|line)?\d*"
    r"|sti\d+|din\d*|digitalin(put)?\d*|(port|stimulus)codes?|(push|event)?button(press)?\d*"
)
FILLERS = re.compile(
    r"(sample|frame|packet|block|record|sequence)(counter|count|cnt|number|index|idx|num)\d*"
    r"|counter\d*|batt(ery)?(level|v|volt|voltage|percent|status)?\d*"
    r"|(dummy|unused|notused|notconnected|empty)(channel)?\d*|checksum|crc|(log|session|device)id"
)
# of channels of stages, and of those of other states; what is read of them are annotations
STAGES = re.compile(r"(sleep)?(stages?|staging)(codes?|channel|ch)?\d*|hypno[a-z0-9]*")
STATES = re.compile(
    r"(class|activity|gesture)?labels?|(activity|class|gesture|condition)(id|codes?)"
    r"|class(es)?|gestures?|(re)?stimulus|conditions?|eye(state|detection)"
    r"|(is)?(a?wake|asleep)|(sleep|wake)(wake|sleep|state)"
)
LABELS = re.compile(f"{STAGES.pattern}|{STATES.pattern}")
NO_INPUTS = {"MISC", "OTHER", "REF", "SYSCLOCK", "ADC", "DAC"}  # types of BIDS
LOW_BITS = 0xFFFF  # of a channel of more than 16 bits: BioSemi keeps flags of its own above them
NEAR_WHOLE = 0.25  # of a number: a converter of 12 bits stores stages so
NO_CODE = -(1 << 40)  # in place of a value that is no whole number
MOST_CHANGES = 0.1  # a sample: what changes more often holds no codes
# electrodes with two names
SITES = {"a1": "m1", "a2": "m2", "t3": "t7", "t4": "t8", "t5": "p7", "t6": "p8"}
ELECTRODE = re.compile(r"(?:fp|af|fc|ft|cp|tp|po|[fctpoima])(?:z|\d{1,2})|fpz|afz|poz|nz|iz")
CODE_CHANNEL, FILLER_CHANNEL, BAD_CHANNEL = "codes", "no signal", "bad"
LABEL_CHANNEL = "labels"
EAR = re.compile(r"(?<=[zopcft1-8])([am][12])$")  # behind an electrode: C3A2
STEPS = 4  # of the converter: a channel that varies less is flat


class LeftOutChannel(NamedTuple):
    """A channel that is not stored, and why."""

    name: str
    reason: str
    text: str


# --- names


def fold_name(name: str) -> str:
    """The name of a channel without what differs between spellings of one signal.

    Capitals, blanks, brackets and dots do not count, nor do `EEG ` before an electrode and `-Ref`
    behind it, nor how two electrodes are parted; those with two names have the newer one.
    """
    text = re.sub(r"[-_\s]ref$", "", name.strip().casefold())
    bare = re.sub(r"^(eeg|pol)[\s_]*", "", text)
    parts = re.split(r"[\s_]*[-\u2013:/][\s_]*|[\s_]+(?=[a-z])", EAR.sub("-\\1", bare))
    sites = [SITES.get(part, part) for part in parts]
    if ELECTRODE.fullmatch(sites[0]):
        text = "-".join(sites)
    return re.sub(r"[\s_.:()\[\]]|-(?!$)", "", text)


def has_electrode(name: str) -> bool:
    """Whether a name says where on the head a channel is."""
    return any(map(ELECTRODE.fullmatch, re.split(r"[^a-z0-9]+", name.casefold())))


def find_name(wanted: str, names: Collection[str]) -> str | None:
    """The channel of this name, else the only one in another spelling of it."""
    if wanted in names:
        return wanted
    same = [name for name in names if fold_name(name) == fold_name(wanted)]
    return find_only(same, None)


def find_source(text: str, names: Collection[str]) -> tuple[str, ...] | None:
    """The channels of a file behind a text of a map: one, or those of a derivation; None: absent.

    Both of a derivation may be in another spelling.
    """
    if text in names:
        return (text,)
    plus, sign, minus = text.partition(MINUS)
    parts = (find_name(plus.strip(), names), find_name(minus.strip(), names))
    if not sign or parts[0] is None or parts[1] is None or parts[0] == parts[1]:
        return None
    return parts[0], parts[1]


def suggest_source(wanted: str, names: Sequence[str]) -> str | None:
    """What a file has for the channel `wanted`: it in another spelling, or as a derivation.

    None where every candidate would be another signal.
    """
    name = find_name(wanted, names)
    if name is not None:
        return name
    plus, sign, minus = wanted.partition("-")
    bare = re.sub(r"^(eeg|pol)[\s_]+", "", plus.strip(), flags=re.IGNORECASE)
    parts = (find_name(bare, names), find_name(minus.strip(), names))
    if not sign or not all(parts) or parts[0] == parts[1]:
        return None
    is_referenced = {bool(re.search(r"[-_\s]ref$", str(part).casefold())) for part in parts}
    return MINUS.join(map(str, parts)) if len(is_referenced) == 1 else None


def list_choices(rule: FileRule) -> tuple[ChannelChoice, ...]:
    """The channels of a group of the map, in its order; () for all.

    Names in the file with one name in the cache are alternatives.
    """
    if not isinstance(rule.channels, dict):
        return tuple(ChannelChoice(name, (name,)) for name in rule.channels)
    choices: dict[str, ChannelChoice] = {}
    for key, value in rule.channels.items():
        if isinstance(value, tuple):
            new = ChannelChoice(key, value)
        elif not isinstance(value, str):
            new = ChannelChoice(value.name, (key,), value.unit)
        elif MINUS in value:
            new = ChannelChoice(key, (value,))
        else:
            new = ChannelChoice(value, (key,))
        old = choices.get(new.name, ChannelChoice(new.name, ()))
        sources = (*old.sources, *new.sources)
        choices[new.name] = ChannelChoice(new.name, sources, old.unit or new.unit)
    return tuple(choices.values())


def list_plain(choices: Sequence[ChannelChoice]) -> dict[str, tuple[str, str]]:
    """Name in the file -> name in the cache and unit, where each channel has one name in the files,
    which its reader can look for.
    """
    if any(len(choice.sources) != 1 or MINUS in choice.sources[0] for choice in choices):
        return {}
    return {choice.sources[0]: (choice.name, choice.unit) for choice in choices}


def list_needed(names: Sequence[str], info: RecordingInfo) -> list[str]:
    """The channels of a file that the map's alternatives and derivations read; all without them."""
    needed: set[str] = set()
    for choice in info.choices:
        for text in choice.sources:
            needed.update(find_source(text, names) or ())
    return [name for name in names if name in needed] or list(names)


# --- channels that are no signals


def _fold_letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def is_no_signal(name: str) -> bool:
    """Whether a name is that of a channel of codes, markers, counters or the like."""
    letters = _fold_letters(name)
    return any(form.fullmatch(letters) for form in (CODES, FILLERS, LABELS))


def holds_codes(name: str, info: RecordingInfo) -> bool:
    """Whether a channel is one of codes, by its type in BIDS, else by its name."""
    if kind := info.facts.get(name, NO_FACTS).kind:
        return kind in {"TRIG", "STIM"}
    return CODES.fullmatch(_fold_letters(name)) is not None


def holds_labels(name: str, info: RecordingInfo, form: re.Pattern[str]) -> bool:
    """Whether a channel without a type in BIDS is one of `STAGES` or `STATES` by its name."""
    is_typed = info.facts.get(name, NO_FACTS).kind
    return not is_typed and form.fullmatch(_fold_letters(name)) is not None


def list_left_out(names: Iterable[str], info: RecordingInfo) -> list[LeftOutChannel]:
    """The channels among `names` that are not stored unless the map names them."""
    left_out: list[LeftOutChannel] = []
    for name in names:
        kind, _, is_bad = info.facts.get(name, NO_FACTS)
        if is_bad:
            left_out.append(LeftOutChannel(name, BAD_CHANNEL, "is marked as bad"))
        elif holds_codes(name, info):
            left_out.append(LeftOutChannel(name, CODE_CHANNEL, "holds codes"))
        elif holds_labels(name, info, LABELS):
            left_out.append(LeftOutChannel(name, LABEL_CHANNEL, "holds labels"))
        elif kind in NO_INPUTS:
            text = f"is of type {kind} by the channels table"
            left_out.append(LeftOutChannel(name, FILLER_CHANNEL, text))
        elif not kind and FILLERS.fullmatch(_fold_letters(name)):
            left_out.append(LeftOutChannel(name, FILLER_CHANNEL, "is a counter or the like"))
    return left_out


def read_triggers(parts: Sequence[Signal]) -> list[Annotation]:
    """The codes of a channel as points in time, called by their numbers; none where it changes too
    often to hold codes.

    Each run of equal values is one, but for those of the value at rest, which is the commonest.
    High bits that are set at rest, too, are flags and no part of a code. `parts`: the segments.
    """
    values = np.concatenate(list(map(_read_codes, parts)))
    times = np.concatenate(
        [part.onset + np.arange(len(part.samples)) / part.rate for part in parts]
    )
    starts = np.flatnonzero(np.diff(values, prepend=NO_CODE - 1))
    is_busy = len(starts) > max(2, MOST_CHANGES * len(values))
    if is_busy or (values == NO_CODE).all():
        return []
    levels, counts = np.unique(values[values != NO_CODE], return_counts=True)
    rest = int(levels[counts.argmax()])
    flags = rest & ~0xFF if rest > 0 and ((levels & rest) == rest).all() else 0
    return [
        Annotation(float(times[start]), 0.0, str(int(values[start]) - flags))
        for start in starts
        if values[start] not in {rest, NO_CODE}
    ]


def read_states(parts: Sequence[Signal], *, is_bridged: bool = False) -> list[Annotation]:
    """The runs of equal whole numbers of a channel, called by their numbers.

    They are points where all are single samples; there are none where the channel changes too often
    to hold codes. `parts`: the segments; `is_bridged`: a run goes on over missing samples.
    """
    notes: list[Annotation] = []
    for part in parts:
        numbers = part.samples.astype(np.float64) * part.scale + part.offset
        values = np.rint(numbers)
        places = np.flatnonzero(np.abs(numbers - values) <= NEAR_WHOLE)  # NaN is not near
        gap = len(values) if is_bridged else 1  # the longest step between samples of a run
        starts, ends = _find_runs(values, places, gap)
        if is_bridged:
            ends = np.append(starts[1:], ends[-1:])
        notes += [
            Annotation(
                part.onset + start / part.rate, (end - start) / part.rate, f"{values[start]:.0f}"
            )
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
    samples = sum(len(part.samples) for part in parts)
    if len(notes) > max(2, MOST_CHANGES * samples):
        return []
    are_points = all(note.duration * parts[0].rate < 1.5 for note in notes)
    return [note._replace(duration=0.0) for note in notes] if are_points else notes


def _find_runs(values: np.ndarray, places: np.ndarray, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """First places of the runs of equal values at `places`, and the places behind their last ones;
    a run ends where more than `gap` lies between two places.
    """
    if not places.size:
        return places, places
    changes = (np.diff(values[places]) != 0) | (np.diff(places) > gap)
    bounds = np.flatnonzero(np.concatenate(([True], changes, [True])))
    return places[bounds[:-1]], places[bounds[1:] - 1] + 1


def group_segments(signals: Iterable[Signal]) -> dict[str, list[Signal]]:
    """Channel -> its segments."""
    return group_by(signals, lambda signal: signal.channel)


def _read_codes(signal: Signal) -> np.ndarray:
    """The whole numbers of a channel, int64; `NO_CODE` for other values."""
    digital = signal.samples.astype(np.float64)
    if signal.rails is not None and signal.rails[1] > 1 << 15:
        return digital.astype(np.int64) & LOW_BITS
    values = digital * signal.scale + signal.offset
    whole = np.rint(values)
    if signal.samples.dtype.kind == "i":
        # half a step of the converter, and what the rounding of its limits in the header adds
        near = np.minimum(0.51 * abs(signal.scale) + 1e-4 * np.abs(values), 0.25)
        is_scaled = (np.abs(values - whole) > near).any()  # like a voltage
        return (digital if is_scaled else whole).astype(np.int64)
    is_code = np.abs(values - whole) <= 0.02  # NaN and infinity are not near
    return np.where(is_code, whole, NO_CODE).astype(np.int64)


# --- selection


def select_channels(
    signals: Sequence[Signal], info: RecordingInfo, remarks: list[Finding]
) -> tuple[list[Signal], list[Annotation]]:
    """The channels of the map under their names, else all that are signals, in the units of the
    map; and the triggers of channels of codes.

    Raises UserError: no_input without signals, missing_channel, unit, sampling_rate.
    """
    filled = [signal for signal in signals if len(signal.samples)]
    if not filled:
        raise input_error(
            Reason.NO_INPUT, "holds no signals", "files of annotations alone are no recordings"
        )
    filled = [resolve_unit(signal, info, remarks) for signal in filled]
    names = list(dict.fromkeys(signal.channel for signal in signals))
    _compare_rate(filled, info, remarks)
    if info.is_part:
        return filled, []
    plain = [ChannelChoice(name, (key,), unit) for key, (name, unit) in info.channels.items()]
    selected: list[Signal] = []
    for choice in info.choices or plain or _choose_inputs(names, info, remarks):
        selected += _read_choice(choice, names, filled, info, remarks)
    return selected, _collect_triggers(filled, info)


def _choose_inputs(
    names: Sequence[str], info: RecordingInfo, remarks: list[Finding]
) -> list[ChannelChoice]:
    """The channels that are signals, without a map; all where none is."""
    left_out = list_left_out(names, info)
    absent = {channel.name for channel in left_out}
    inputs = [name for name in names if name not in absent]
    if inputs:
        remarks += map(_describe_left_out, left_out)
    return [ChannelChoice(name, (name,)) for name in inputs or names]


def _compare_rate(signals: Sequence[Signal], info: RecordingInfo, remarks: list[Finding]) -> None:
    """A warning where no channel has the rate that the description beside the file states."""
    stated = info.stated_rate
    rates = sorted({signal.rate for signal in signals})
    if stated and not any(math.isclose(rate, stated, rel_tol=1e-3) for rate in rates):
        listed = ", ".join(f"{rate:g}" for rate in rates[:5])
        problem = f"the channels are sampled at {listed} Hz, the .json beside it states {stated:g}"
        action = "that of the file counts"
        remarks.append(input_warning(Reason.SAMPLING_RATE, problem, action, field="rate"))


def _describe_left_out(channel: LeftOutChannel) -> Finding:
    return Finding(
        Reason.LEFT_OUT,
        f"{safe_text(channel.name)} {channel.text}",
        "not stored",
        "Name it in channels of the map to keep it",
        level="info",
        field="channels",
        found=safe_text(channel.name),
        expected=channel.reason,
    )


def _collect_triggers(signals: Sequence[Signal], info: RecordingInfo) -> list[Annotation]:
    """The triggers of all channels of codes, and the states of those of labels; a table of events
    says the same in words.
    """
    if info.notes or info.numbers:
        return []
    segments = group_segments(signals)
    notes: list[Annotation] = []
    for channel, parts in segments.items():
        if holds_labels(channel, info, STATES):
            notes += read_states(parts)
    for channel, parts in segments.items():
        if holds_codes(channel, info):
            notes += read_triggers(parts)
    return notes


def _read_choice(
    choice: ChannelChoice,
    names: Sequence[str],
    signals: Sequence[Signal],
    info: RecordingInfo,
    remarks: list[Finding],
) -> list[Signal]:
    """The segments of one channel of the map."""
    sources = list(filter(None, (find_source(text, names) for text in choice.sources)))
    if not sources:
        wanted = list(map(safe_text, choice.sources))
        problem = f"has no channel {' or '.join(wanted[:6])}"
        raise make_missing_channel_error(problem, names, "channels", wanted[0])
    if sources[1:]:
        texts = [safe_text(MINUS.join(source)) for source in sources]
        problem = f"{safe_text(choice.name)} is there as {' and as '.join(texts)}"
        action = f"{texts[0]} is read, the first in the map"
        remarks.append(input_warning(Reason.DUPLICATE_CHANNEL, problem, action, field="channels"))
    segments = group_segments(signals)
    first, *others = (segments.get(name, []) for name in sources[0])
    for signal in first:
        _check_rate(signal, info.rate)
    read = derive_signals(first, *others) if others else first
    unit = choice.unit or info.unit
    return [convert_unit(signal, unit)._replace(channel=choice.name) for signal in read]


def make_missing_channel_error(
    problem: str, names: Iterable[str], field: str, expected: str
) -> UserError:
    """The error for a channel that a file with the channels `names` does not have."""
    listed = ", ".join(map(safe_text, islice(names, 12)))
    code = Reason.MISSING_CHANNEL
    return input_error(code, problem, f"found {listed}", field=field, expected=expected)


def _check_rate(signal: Signal, rate: float | None) -> None:
    """Raises UserError (sampling_rate) for another rate than the map states."""
    if rate is not None and not math.isclose(signal.rate, rate, rel_tol=1e-6):
        problem = f"{safe_text(signal.channel)} is sampled at {signal.rate:g} Hz"
        wanted = f"the map states {rate:g} Hz"
        raise input_error(Reason.SAMPLING_RATE, problem, wanted, field="rate")


def derive_signals(plus: Sequence[Signal], minus: Sequence[Signal]) -> list[Signal]:
    """The difference of two channels, segment by segment, as physical float32 in the unit of the
    first.

    Raises UserError: sampling_rate, length, unit for channels that do not fit together.
    """
    others = {signal.onset: signal for signal in minus}
    return [_subtract(signal, others.get(signal.onset)) for signal in plus]


def _subtract(plus: Signal, minus: Signal | None) -> Signal:
    if minus is None or len(minus.samples) != len(plus.samples):
        name = safe_text(plus.channel)
        problem = f"the channel to be subtracted from {name} has other times or another length"
        raise input_error(Reason.LENGTH, problem, "expected the same samples", field="channels")
    names = f"{safe_text(plus.channel)} minus {safe_text(minus.channel)}"
    if not math.isclose(plus.rate, minus.rate, rel_tol=1e-6):
        problem = f"{names}: {plus.rate:g} and {minus.rate:g} Hz"
        raise input_error(Reason.SAMPLING_RATE, problem, "expected one rate", field="channels")
    factor = find_unit_factor(minus.unit, plus.unit)
    if factor is None:
        problem = f"{names}: in {safe_text(plus.unit)} and {safe_text(minus.unit)}"
        raise input_error(
            Reason.UNIT, problem, "expected one unit", "State it in [units]", field="channels"
        )
    values = plus.samples * float(plus.scale) + plus.offset
    values = values - (minus.samples * float(minus.scale) + minus.offset) * factor
    return plus._replace(samples=values.astype(np.float32), scale=1.0, offset=0.0, rails=None)


# --- units


def convert_unit(signal: Signal, unit: str) -> Signal:
    """The signal in `unit`.

    One without a unit is assumed to have it, others of its quantity are converted. Raises UserError
    (unit) for another quantity.
    """
    if not unit or signal.unit.strip() == unit.strip():
        return signal
    if not signal.unit.strip():
        return signal._replace(unit=unit)
    factor = find_unit_factor(signal.unit, unit)
    if factor is None:
        text = safe_text(signal.unit)
        raise input_error(
            Reason.UNIT,
            f"{safe_text(signal.channel)} is in {text}",
            f"the map states {safe_text(unit)}",
            f"State what the file means: [units] {quote_unit(signal.channel, unit)}",
            field="unit",
            found=text,
        )
    return scale_signal(signal, factor, unit)


def quote_unit(channel: str, unit: str) -> str:
    """A line of [units]."""
    return f'"{channel}" = "{unit}"'


def find_stated_unit(channel: str, units: Mapping[str, str]) -> str:
    """The unit of a channel by `units` of the map; its name comes before patterns."""
    if channel in units:
        return units[channel]
    fits = (unit for pattern, unit in units.items() if fnmatch.fnmatchcase(channel, pattern))
    return next(fits, "")


def resolve_unit(signal: Signal, info: RecordingInfo, remarks: list[Finding]) -> Signal:
    """The signal in a unit of `formats.units`, as far as the map, the file or the table of BIDS
    says it.
    """
    stated = find_stated_unit(signal.channel, info.units)
    if stated:
        return _override_unit(signal, stated, remarks)
    unit = find_unit(signal.unit)
    beside = info.facts.get(signal.channel, NO_FACTS).unit
    if unit is None and beside:
        return signal._replace(unit=_spell_unit(beside))
    if unit is None:
        return signal
    if beside and find_unit_factor(unit.name, beside) != 1.0:
        text = f"{safe_text(signal.channel)} is in {unit.name}, its table in {safe_text(beside)}"
        remarks.append(input_warning(Reason.UNIT, text, "that of the file is used", field="units"))
    return signal._replace(unit=unit.name)


def _spell_unit(text: str) -> str:
    """A unit as `formats.units` writes it; one that it does not know as it is."""
    unit = find_unit(text)
    return text if unit is None else unit.name


def _override_unit(signal: Signal, stated: str, remarks: list[Finding]) -> Signal:
    """The signal in the unit that the map states.

    A unit of the file is believed where it alone makes the values plausible for such a channel.
    """
    name = _spell_unit(stated)
    factor = find_unit_factor(signal.unit, name)
    if factor is None or factor == 1.0:
        return signal._replace(unit=name)
    spread = measure_spread(signal)
    is_literal = name in list_plausible_units(signal.channel, spread)
    is_converted = name in list_plausible_units(signal.channel, spread * factor)
    text = f"{safe_text(signal.channel)} is in {safe_text(signal.unit)}, the map states {name}"
    values = f"its values of about {spread:.3g}"
    if is_converted and not is_literal:
        action = f"converted: {values} are {spread * factor:.3g} {name}"
        remarks.append(input_warning(Reason.UNIT, text, action, field="units"))
        return scale_signal(signal, factor, name)
    action = f"{values} are taken for {name}"
    remarks.append(input_warning(Reason.UNIT, text, action, field="units"))
    return signal._replace(unit=name)


def assume_units(
    signals: Sequence[Signal], info: RecordingInfo
) -> tuple[list[Signal], list[Finding]]:
    """Signals of a format that states units, where a unit is empty or mangled: in the only unit of
    voltage in which the values are plausible.

    What is assumed, and what cannot be, is a warning.
    """
    assumed: dict[str, str] = {}
    remarks: list[Finding] = []
    for signal in signals:
        name = signal.channel
        if name in assumed or not _is_unit_open(signal, info):
            continue
        spread = measure_spread(signal)
        unit = _guess_unit(signal, spread)
        filled = unit or signal.unit
        if filled.strip():
            assumed[name] = filled
            remarks.append(_report_unit(signal, spread, unit))
    for name, signal in {signal.channel: signal for signal in signals}.items():
        if name not in assumed and not find_stated_unit(name, info.units):
            remarks += _question_unit(signal)
    return [s._replace(unit=assumed.get(s.channel, s.unit)) for s in signals], remarks


def _is_unit_open(signal: Signal, info: RecordingInfo) -> bool:
    """Whether neither the file, nor the map, nor the table of BIDS states the unit of a channel."""
    name, unit = signal.channel, signal.unit.strip()
    if unit and (find_unit(unit) or not MANGLED.fullmatch(unit)):
        return False
    if find_stated_unit(name, info.units) or info.facts.get(name, NO_FACTS).unit:
        return False
    return not holds_codes(name, info) and not is_no_signal(name)


def _guess_unit(signal: Signal, spread: float) -> str:
    """The only unit of voltage in which the values are plausible; "": none is.

    A mangled one can be uV alone, also of a channel whose name says nothing, with values as those
    of an EEG.
    """
    units = list_plausible_units(signal.channel, spread)
    if not signal.unit.strip():
        return units[0] if units else ""
    has_kind = any(list_plausible_units(signal.channel, 10.0**power) for power in range(-9, 6))
    is_micro = "uV" in units or (not has_kind and 1.0 <= spread < 1000.0)
    return "uV" if is_micro else ""


def _question_unit(signal: Signal) -> list[Finding]:
    """The warning about a unit that is not known, or in which the values are not plausible."""
    name, unit = signal.channel, find_unit(signal.unit)
    spread = measure_spread(signal)
    flat = STEPS * abs(signal.scale) if signal.samples.dtype.kind == "i" else 0.0
    text = f"{safe_text(name)} is in {safe_text(signal.unit)}"
    if unit is None and signal.unit.strip() and is_voltage_channel(name):
        problem, proposed = f"{text}, a unit that is not known", "uV"
    elif unit is not None and spread > flat and is_far_off(name, unit, spread):
        plausible = list_plausible_units(name, spread)
        problem = f"{text}, its values of about {spread:.3g} are not plausible in that"
        proposed = plausible[0] if plausible else "uV"
    else:
        return []
    hint = f"Where it is wrong, state it in the map, such as [units] {quote_unit(name, proposed)}"
    return [input_warning(Reason.UNIT, problem, "kept as stated", hint, field=name)]


def _report_unit(signal: Signal, spread: float, unit: str) -> Finding:
    stated = f"is in {safe_text(signal.unit)}" if signal.unit.strip() else "states no unit"
    lines = f"[units] {quote_unit(signal.channel, unit or 'uV')}"
    values = f"{safe_text(signal.channel)} {stated}, its values are about {spread:.3g}"
    if unit:
        action = f"assumed {unit}, the unit of voltage in which that is plausible"
        hint = f"State another in the map: {lines}"
    else:
        action = "in no unit of voltage is that plausible"
        hint = f"State the unit in the map, such as {lines}"
    return input_warning(Reason.UNIT, values, action, hint, field=signal.channel)
