"""Writes docs/leakage.md: the stamp of a run on each shipped view under each objective.
docs/generate.py does it too; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from bitimely_core import models, objectives, registry
from bitimely_core.config import ModelConfig, ObjectiveConfig, Settings, build_model_config
from bitimely_core.models.tokenizers import FIRST
from bitimely_core.schemas.tokens import SamplePreparation, WindowOptions
from bitimely_core.tokens.choices import WindowChoices, resolve_options
from bitimely_core.tokens.cutting import describe_preparation

PAGE = Path(__file__).parent / "leakage.md"
# of the recording that stands for those of a data set whose views take channels and rate from it
SECONDS = 3600
HEAD = """# Which runs are leak-free: the stamp of every view under every objective

Made by `python docs/generate.py` from the registry; a test compares every cell with native samples that are really changed. What the words mean: [method](method.md#the-stamp-starts-at-the-native-samples).

* A run has the model named beside the objective, the preset `tiny`, and tokens by `bitimely tokenize VIEW` without options.
* `--normalise window` adds `given window statistics`. `--resampling pointwise` makes every cell `true` that says only `channels`.
* The data sets `{own}` take channels and rate from the recordings; both cases are listed.
"""


class ViewCase(NamedTuple):
    """A view with channels at known native rates."""

    dataset: str
    view: str
    # whether the channels of the first recording have several rates; None: the view says
    several: bool | None
    rates: tuple[tuple[str, float], ...]  # channel and native Hz; (): codes
    options: WindowOptions | None  # None: codes

    @property
    def preparation(self) -> SamplePreparation:
        """As `tokenize` records it."""
        return (
            SamplePreparation(channels=())
            if self.options is None
            else describe_preparation(self.prepared_rates, self.options)
        )

    @property
    def prepared_rates(self) -> tuple[tuple[str, float], ...]:
        """Those of the channels that are left once irregular samples are on their grid."""
        irregular = self.options is not None and self.options.clock is not None
        return tuple((name, self.options.rate if irregular else rate) for name, rate in self.rates)  # type: ignore[union-attr]


def list_cases() -> Iterator[ViewCase]:
    """Every shipped view; one without a rate of its own twice."""
    for name, entry in sorted(registry.datasets.items()):
        if not entry.function.__module__.startswith("bitimely_core."):
            continue
        for view, facts in entry.facts.views.items():
            if entry.facts.kind == "events":
                yield ViewCase(name, view, None, (), None)
            elif facts.rate > 0:
                yield make_case(
                    name,
                    view,
                    several=None,
                    rates={
                        one: entry.facts.native_rates.get(one, facts.rate) for one in facts.channels
                    },
                )
            else:
                yield make_case(name, view, several=False, rates={"a": 100.0, "b": 100.0})
                yield make_case(name, view, several=True, rates={"a": 100.0, "b": 1.0})


def make_case(
    dataset: str, view: str, *, several: bool | None, rates: dict[str, float]
) -> ViewCase:
    """With the options that `tokenize` resolves for a recording with these channels."""
    import polars as pl

    signals = [
        {"recording_id": "r", "channel": name, "rate": rate, "n_samples": int(SECONDS * rate)}
        for name, rate in rates.items()
    ]
    tables = {
        "signals": signals,
        "annotations": [{"recording_id": "r", "duration": seconds} for seconds in (0.0, 30.0)],
        "subjects": [{"recording_id": "r"}],
    }
    recording = SimpleNamespace(
        dataset=dataset,
        manifest=SimpleNamespace(settings=SimpleNamespace(options={})),
        recording_ids=lambda: ["r"],
        **{name: lambda rows=rows: pl.DataFrame(rows) for name, rows in tables.items()},
    )
    options = resolve_options(recording, WindowChoices(view=view))  # type: ignore[arg-type]
    return ViewCase(dataset, view, several, tuple(rates.items()), options)


@cache
def choose_models(objective: str) -> list[str]:
    """Those whose own objective it is, first those that read codes, too; if none does, bitimelygpt
    before them.
    """
    own = [name for name, entry in registry.models.items() if entry.facts.objective == objective]
    own = sorted(
        own,
        key=lambda name: (
            "events" not in registry.models[name].facts.input,
            registry.models[name].facts.family != "retention",
            name,
        ),
    )
    fits = [
        name
        for name in ("bitimelygpt", *sorted(registry.models))
        if objective in objectives.compatible_objectives(name)
    ]
    return (
        own
        if own and ("events" in registry.models[own[0]].facts.input or fits[0] != "bitimelygpt")
        else [fits[0], *own]
    )


@cache
def make_config(
    model: str, length: int, codes: int | None = None, channels: int = 1
) -> ModelConfig:
    """The configuration of the preset `tiny` as the model reads it."""
    events: dict[str, Any] = {}
    if codes is not None:
        events = {"tokenizer": "codes", "codes": FIRST + codes}
        events |= {} if "events" in registry.models[model].facts.input else {"events": "grid"}
    with torch.device("meta"):
        return models.from_config(
            build_model_config(model, "tiny", channels=channels, length=length, **events)
        ).config


def find_stamp(
    case: ViewCase, objective: str, model: str, normalise: str = "channel"
) -> bool | str | None:
    """As `pretrain` stamps it."""
    config = (
        make_config(model, 64, codes=20)
        if case.options is None
        else make_config(model, case.options.window)
    )
    settings = Settings(model=config, objective=ObjectiveConfig(name=objective))
    return objectives.leak_free(settings, normalise=normalise, preparation=[case.preparation])


def format_names(found: list[ViewCase], cases: list[ViewCase]) -> str:
    """As `--data` takes them; a data set all of whose views are there by its name."""
    out: dict[str, None] = {}
    for case in found:
        kind = (case.dataset, case.several)
        views, here = (
            [one.view for one in some if (one.dataset, one.several) == kind]
            for some in (cases, found)
        )
        name = (
            f"`{case.dataset}`{' (all views)' if len(views) > 1 else ''}"
            if views == here
            else f"`{case.dataset}/{case.view}`".replace("/`", "`")
        )
        out[name + {None: "", False: ", one rate", True: ", several rates"}[case.several]] = None
    return "; ".join(out)


def format_page() -> str:
    """Rows are views with the same answers."""
    stated = [
        name
        for name, entry in sorted(registry.objectives.items())
        if entry.facts.leak_free is not None
    ]
    rows: dict[tuple[str, ...], list[ViewCase]] = {}
    cases = list(list_cases())
    for case in cases:
        irregular = case.options is not None and case.options.irregular
        stamps = [
            "-" if irregular else find_stamp(case, name, choose_models(name)[0]) for name in stated
        ]
        rows.setdefault(tuple(str(one).lower() for one in stamps), []).append(case)
    own = sorted({case.dataset for case in cases if case.several is not None})
    others = [f"`{name}`" for name in sorted(registry.objectives) if name not in stated]
    out = [
        HEAD.replace("{own}", "`, `".join(own)),
        "| views | " + " | ".join(f"`{name}` ({choose_models(name)[0]})" for name in stated) + " |",
    ]
    out += [
        "| --- " * (len(stated) + 1) + "|",
        *(
            "| " + " | ".join([format_names(found, cases), *answers]) + " |"
            for answers, found in rows.items()
        ),
        "",
    ]
    out += [
        "`-`: no model that reads irregular times has the objective.",
        "",
        f"Without a target, so never stamped: {', '.join(others)}.",
        "",
    ]
    return "\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(format_page())
