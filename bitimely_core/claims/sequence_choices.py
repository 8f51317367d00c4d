"""The choices of a build of sequences, checked, and the presets. None of them requires reading the
source again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bitimely_core.claims import codes, dates, event_times
from bitimely_core.claims.event_labels import Landmark

T = TypeVar("T")

CHOICES = {
    "level": codes.LEVELS,
    "leakage": ("keep", "drop_icd", "drop_phecode"),
    "population": ("subjects", "observed"),
    "denominator": ("all", "controls"),
    "dedupe": ("day", "month", "none", "first_per_age30"),
    "min_codes_unit": ("events", "records", "unique"),
    "time": ("months", "calendar_month", "age30"),
    "select": (True, False, "frequency"),
    "values": ("none", "deciles", "raw"),
}
LEAST_VALUES = {"top_k": 0, "min_case_support": 1, "min_codes": 0}
VALUE_RANGES = {
    "threshold": (-math.inf, math.inf),
    "min_case_fraction": (0.0, 1.0),
    "min_record_frequency": (0.0, 1.0),
}


def check_value(name: str, value: T, choices: Sequence[object]) -> T:
    """`value`, if it is one of the choices; else a ValueError. 1 is not True."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name} is one of {', '.join(map(str, choices))}, found {value!r}")
    return value


def check_integer(name: str, value: object, least: int) -> int:
    """`value`, if it is an integer of at least `least`; else a ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is an integer of at least {least}, found {value!r}")
    return value


def check_range(name: str, value: object, least: float, most: float) -> float:
    """`value`, if it is a number from `least` to `most`; else a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} is a number from {least} to {most}, found {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class SequenceChoices:
    """Choices of a build of sequences. The defaults are the preset `paper`.

    Raises ValueError for an unknown value.
    """

    level: str = "integer"  # roll-up of PheCodes: integer, first_decimal or full
    leakage: str = "keep"  # keep, drop_icd or drop_phecode
    landmark: Landmark | None = None
    population: str = "subjects"  # of the ratios: all subjects, or observed: those with a record
    denominator: str = "all"  # reference group of the ratios: all of them, or controls
    threshold: float = 5.0  # PheCodes with a greater ratio are selected
    top_k: int = 5  # number selected for a label without any such PheCode
    min_case_support: int = 1  # carriers among the cases that a PheCode needs to be considered
    min_case_fraction: float = 0.0  # the same as a share of the cases; the larger limit applies
    # True: PheCodes above the threshold of any label; False: every PheCode of a training subject;
    # frequency: those with more than `min_record_frequency` of the records of training subjects
    select: bool | str = True
    min_record_frequency: float = 0.001
    dedupe: str = "day"  # day, month, none or first_per_age30
    min_codes: int = 10  # subjects with fewer are excluded
    min_codes_unit: str = "events"  # events, records or unique
    max_events: int | None = None  # only the last ones are kept
    time: str = "months"  # clock: months, calendar_month or age30
    # numbers of codes that are not ICD: none, deciles (those of the training subjects, as a part
    # of the code) or raw (the numbers)
    values: str = "none"
    # horizons, in days, of the predicted risks; labels are then times to event
    time_to_event: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "time_to_event", event_times.parse_horizons(self.time_to_event))
        for name, choices in CHOICES.items():
            check_value(name, getattr(self, name), choices)
        for name, least in LEAST_VALUES.items():
            check_integer(name, getattr(self, name), least)
        if self.max_events is not None:
            check_integer("max_events", self.max_events, 1)
        for name, (low, high) in VALUE_RANGES.items():
            check_range(name, getattr(self, name), low, high)

    @property
    def input_order(self) -> bool:
        """Whether the rows need the column `row`, the order of the input."""
        return self.dedupe == "first_per_age30"


PRESETS = {
    "paper": SequenceChoices(),
    "original": SequenceChoices(
        select="frequency",
        min_codes=50,
        min_codes_unit="records",
        time="age30",
        dedupe="first_per_age30",
    ),
    "strict": SequenceChoices(
        landmark=Landmark(), leakage="drop_phecode", min_case_support=20, min_case_fraction=0.005
    ),
}


def parse_landmark(parameters: Mapping[str, object] | None) -> Landmark | None:
    """A landmark from its parameters: landmark_days or date, gap_days, horizon_days. Those that are
    absent have their defaults.

    Raises ValueError for other parameters or values.
    """
    if parameters is None:
        return None
    names = {"landmark_days", "gap_days", "horizon_days"}
    if not set(parameters) <= names | {"date"} or {"date", "landmark_days"} <= set(parameters):
        raise ValueError(
            f"a landmark has landmark_days or date, gap_days and horizon_days, found {parameters!r}"
        )
    landmark = replace(
        Landmark(),
        **{name: check_integer(name, parameters[name], 0) for name in names & set(parameters)},
    )
    if "date" not in parameters:
        return landmark
    day = dates.parse_day(parameters["date"]) if isinstance(parameters["date"], str) else None
    if day is None:
        raise ValueError(f"the date of a landmark is YYYY-MM-DD, found {parameters['date']!r}")
    return replace(landmark, day=day, landmark_days=None)
