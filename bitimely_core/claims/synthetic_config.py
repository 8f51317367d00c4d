"""The parameters of `synthetic-claims`. Values, units and meaning are in
`pipelines/demo_claims.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from bitimely_core import registry
from bitimely_core.errors import check_choice, usage_error
from bitimely_core.store.records import describe_invalid

NAME = "synthetic-claims"
RECIPE = "demo_claims.toml"


class SyntheticSection(BaseModel):
    """A section of the parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CalendarConfig(SyntheticSection):
    """First and last day, and the day of the switch to ICD-10, as YYYY-MM-DD."""

    first: str
    last: str
    icd10_from: str


class PopulationConfig(SyntheticSection):
    """Registration, age, death and frailty of subjects."""

    born_inside: float
    entry_age: tuple[float, float]
    women: float
    late: float
    late_years: float
    leave: float
    death: float
    death_age: float
    death_doubling: float
    silent: float
    frailty: float


class VisitConfig(SyntheticSection):
    """Rate and codes of visits."""

    median: float
    sigma: float
    clip: tuple[float, float]
    zipf: float
    preventive: float
    sources: dict[str, float]


class FadingFactor(SyntheticSection):
    """Factor of a hazard that fades after the onset of another state."""

    peak: float
    half_life: float


class StateConfig(SyntheticSection):
    """A chronic state; either its hazard or the prevalence for which the hazard is solved."""

    hazard: float | None = None
    prevalence: float | None = None
    hidden: float = 0.0
    slope: float
    renewal: float
    stay: float
    factors: dict[str, float] = {}
    fading: dict[str, FadingFactor] = {}


class CareConfig(SyntheticSection):
    """Diagnoses that follow from the states."""

    under_coding: float
    jitter: float
    stay_codes: tuple[int, int]
    rule_out: float


class TempoConfig(SyntheticSection):
    """The label `tempo`."""

    share: float
    half_life: float
    weight: float
    base_rate: float
    years: float


class ErrorConfig(SyntheticSection):
    """Shares of spellings and errors."""

    dotted: float
    padded: float
    lower: float
    blank: float
    duplicate: float
    no_date: float
    malformed: float
    unknown: float
    before_birth: float
    birth_month: float
    no_birth: float


class CohortConfig(SyntheticSection):
    """All parameters."""

    calendar: CalendarConfig
    people: PopulationConfig
    visits: VisitConfig
    states: dict[str, StateConfig]
    care: CareConfig
    tempo: TempoConfig
    mess: ErrorConfig


def resolve_config(values: Mapping[str, object]) -> CohortConfig:
    """The parameters of `pipelines/demo_claims.toml`, overridden by `values`, nested alike.

    Raises UserError: config or unknown_name (exit 2) for an unknown key or a value of another type.
    """
    recipe = tomllib.loads((registry.RECIPES / RECIPE).read_text())
    merged = _merge_config(recipe["ingest"]["options"][NAME]["config"], values, "config")
    try:
        return CohortConfig.model_validate(merged)
    except ValidationError as error:
        field, value, message = describe_invalid(error)
        raise usage_error(value, message, field=f"config.{field}") from error


def _merge_config(
    base: Mapping[str, object], values: Mapping[str, object], where: str
) -> dict[str, object]:
    """`base` with `values` in their place, nested; no key is new."""
    merged = dict(base)
    for key, value in values.items():
        check_choice(f"parameter of {NAME} in {where}", key, base)
        default = base[key]
        if isinstance(default, dict) and isinstance(value, dict):
            value = _merge_config(default, value, f"{where}.{key}")
        merged[key] = value
    return merged
